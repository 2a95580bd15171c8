"""HTTP servers of models: the OpenAI API for generation, and an API for scoring."""
