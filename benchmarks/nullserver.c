/* A target that answers at once or after an exact time: the other side of benchmarks/fanout.py.
 *
 *   nullserver PORT SLOTS STEP_US BODY_FILE
 *
 * POST <any> answers BODY_FILE after max_new_tokens (of the request) times STEP_US microseconds, SLOTS
 * requests at a time, the rest first come, first served. GET /metrics has SGLang's gauges, /server_info
 * the slots, /stats what was done; every other path answers 200. HTTP/1.1 keep-alive, one thread, Linux.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FD = 65536, ROOM = 1 << 16 };

typedef struct {
  char *in, *out;           /* request bytes so far; the answer being sent */
  size_t in_len, in_cap, out_len, out_at;
  int out_owned, busy;      /* busy: a request is queued or in service */
  unsigned generation;      /* of the connection on this descriptor */
} Conn;

typedef struct { double due; int fd; unsigned generation; double service; } Job;

static Conn conns[MAX_FD];
static int poller;
static Job *heap, *line;    /* in service, by due time; waiting, first in first out */
static size_t heap_len, heap_cap, line_at, line_len, line_cap;
static char *answer; static size_t answer_len;
static long slots, running, peak, served; static double step_s, busy_s; static long tokens;

static double now(void) {
  struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9;
}
static void *grown(void *p, size_t *cap, size_t need, size_t item) {
  if (need <= *cap) return p;
  while (*cap < need) *cap = *cap ? *cap * 2 : 1024;
  p = realloc(p, *cap * item);
  if (!p) { perror("realloc"); exit(1); }
  return p;
}
static void push(Job job) {
  heap = grown(heap, &heap_cap, heap_len + 1, sizeof *heap);
  size_t i = heap_len++;
  while (i && heap[(i - 1) / 2].due > job.due) { heap[i] = heap[(i - 1) / 2]; i = (i - 1) / 2; }
  heap[i] = job;
}
static Job pop(void) {
  Job first = heap[0], last = heap[--heap_len];
  size_t i = 0, child;
  while ((child = 2 * i + 1) < heap_len) {
    if (child + 1 < heap_len && heap[child + 1].due < heap[child].due) child++;
    if (heap[child].due >= last.due) break;
    heap[i] = heap[child]; i = child;
  }
  heap[i] = last;
  return first;
}
static int alive(Job job) { return conns[job.fd].generation == job.generation; }
static void start(Job job) {
  running++; if (running > peak) peak = running;
  job.due = now() + job.service; push(job);
}
static void enqueue(Job job) {
  if (running < slots) { start(job); return; }
  line = grown(line, &line_cap, line_len + 1, sizeof *line);
  line[line_len++] = job;
}
static void next_in_line(void) {
  while (running < slots && line_at < line_len) { Job job = line[line_at++]; if (alive(job)) start(job); }
  if (line_at == line_len) line_at = line_len = 0;
}
static void watch(int fd, int op, unsigned events) {
  struct epoll_event e = {.events = events, .data.fd = fd}; epoll_ctl(poller, op, fd, &e);
}
static void drop(int fd) {
  Conn *c = &conns[fd];
  if (c->out_owned) free(c->out);
  c->out = NULL; c->out_owned = c->busy = 0; c->in_len = 0; c->generation++;
  close(fd);
}
static void take_requests(int fd);
static void send_rest(int fd) {
  Conn *c = &conns[fd];
  while (c->out_at < c->out_len) {
    ssize_t n = send(fd, c->out + c->out_at, c->out_len - c->out_at, MSG_NOSIGNAL);
    if (n < 0) { if (errno == EAGAIN) watch(fd, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT); else drop(fd); return; }
    c->out_at += n;
  }
  if (c->out_owned) free(c->out);
  c->out = NULL; c->out_owned = c->busy = 0;
  take_requests(fd);
}
static char *http(const char *body, size_t n, const char *type, size_t *len) {
  char *text = malloc(n + 160);
  int head = sprintf(text, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n", type, n);
  memcpy(text + head, body, n); *len = head + n;
  return text;
}
static void reply(int fd, const char *body, const char *type) {
  Conn *c = &conns[fd];
  c->out = http(body, strlen(body), type, &c->out_len); c->out_at = 0; c->out_owned = c->busy = 1;
  send_rest(fd);
}
static long queued(void) {
  long n = 0;
  for (size_t i = line_at; i < line_len; i++) n += alive(line[i]);
  return n;
}
static void get(int fd, const char *path) {
  char body[1024];
  if (!strncmp(path, "/metrics ", 9)) {
    sprintf(body, "sglang:num_running_reqs{tp_rank=\"0\"} %ld\nsglang:num_queue_reqs{tp_rank=\"0\"} %ld\n"
                  "sglang:token_usage{tp_rank=\"0\"} 0.1\nsglang:generation_tokens_total{} %ld\n",
            running, queued(), tokens);
    reply(fd, body, "text/plain");
  } else if (!strncmp(path, "/stats ", 7)) {
    sprintf(body, "{\"served\": %ld, \"peak\": %ld, \"busy_s\": %.6f}", served, peak, busy_s);
    reply(fd, body, "application/json");
  } else {
    sprintf(body, "{\"version\": \"null\", \"max_running_requests\": %ld}", slots);
    reply(fd, body, "application/json");
  }
}
static void take_requests(int fd) {
  Conn *c = &conns[fd];
  if (c->busy || !c->in_len) return;
  c->in[c->in_len] = 0;
  char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
  if (!end) return;
  size_t head = end - c->in + 4, length = 0;
  char *field = strcasestr(c->in, "\r\ncontent-length:");
  if (field && field < end) length = strtoul(field + 17, NULL, 10);
  if (c->in_len < head + length) return;
  int post = !strncmp(c->in, "POST ", 5), abort_request = !strncmp(c->in, "POST /abort_request", 19);
  char path[64] = ""; double service = 0;
  if (post && !abort_request) {
    char *n = memmem(c->in + head, length, "max_new_tokens\":", 16);
    if (!n) n = memmem(c->in + head, length, "\"max_tokens\":", 13);
    long asked = n ? strtol(strchr(n, ':') + 1, NULL, 10) : 1;
    service = asked * step_s; tokens += asked;
  } else if (!post) sscanf(c->in + 4, "%62[^\r]", path);
  memmove(c->in, c->in + head + length, c->in_len - head - length);
  c->in_len -= head + length; c->busy = 1;
  if (post && !abort_request) enqueue((Job){0, fd, c->generation, service});
  else get(fd, path);
}
static void readable(int fd) {
  Conn *c = &conns[fd];
  c->in = grown(c->in, &c->in_cap, c->in_len + ROOM + 1, 1);
  ssize_t n = recv(fd, c->in + c->in_len, c->in_cap - c->in_len - 1, 0);
  if (n == 0 || (n < 0 && errno != EAGAIN)) { drop(fd); return; }
  if (n > 0) { c->in_len += n; take_requests(fd); }
}
static void finish_due(void) {
  while (heap_len && heap[0].due <= now()) {
    Job job = pop(); running--;
    if (alive(job)) {
      Conn *c = &conns[job.fd];
      served++; busy_s += job.service;
      c->out = answer; c->out_len = answer_len; c->out_at = 0; c->out_owned = 0;
      send_rest(job.fd);
    }
    next_in_line();
  }
}
int main(int argc, char **argv) {
  if (argc != 5) { fprintf(stderr, "usage: nullserver PORT SLOTS STEP_US BODY_FILE\n"); return 2; }
  slots = atol(argv[2]); step_s = atof(argv[3]) * 1e-6;
  FILE *file = fopen(argv[4], "rb");
  if (!file) { perror(argv[4]); return 1; }
  fseek(file, 0, SEEK_END); size_t size = ftell(file); rewind(file);
  char *body = malloc(size + 1);
  if (fread(body, 1, size, file) != size) { perror("read"); return 1; }
  fclose(file); answer = http(body, size, "application/json", &answer_len);
  signal(SIGPIPE, SIG_IGN);
  poller = epoll_create1(0);
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])),
                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (void *)&at, sizeof at) || listen(listener, 8192)) { perror("bind"); return 1; }
  watch(listener, EPOLL_CTL_ADD, EPOLLIN);
  puts("serving"); fflush(stdout);
  struct epoll_event events[512];
  for (;;) {
    double wait = heap_len ? (heap[0].due - now()) * 1e3 : -1;
    int n = epoll_wait(poller, events, 512, heap_len ? (wait > 0 ? (int)ceil(wait) : 0) : -1);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      if (fd != listener) {
        if (events[i].events & EPOLLOUT) { watch(fd, EPOLL_CTL_MOD, EPOLLIN); if (conns[fd].out) send_rest(fd); }
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(fd);
        continue;
      }
      for (int taken = 0; taken < 512; taken++) {
        int client = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
        if (client < 0) break;
        if (client >= MAX_FD) { close(client); continue; }
        setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        conns[client].generation++;
        watch(client, EPOLL_CTL_ADD, EPOLLIN);
      }
    }
    finish_due();
  }
}
