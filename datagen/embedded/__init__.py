"""The built-in target: a real small model behind the API of SGLang that this project uses."""
