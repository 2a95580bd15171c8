"""What tests share: tiny models, whole runs, workers and cases that run on ranks of their own."""
