"""Search: a corpus, its indices, a retriever in this process or behind HTTP."""
