"""What a chat template raises on a conversation that it does not render."""

import jinja2

REFUSALS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError)
