"""From prompts to EAGLE-3 drafter training data. Imports nothing: the capture plugin loads inside SGLang."""
