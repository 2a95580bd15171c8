"""The engine behind HTTP: a small server, the OpenAI API in and out, text from tokens as they come."""
