"""GGUF files of llama.cpp: found, read tensor by tensor, and described as a Hugging Face folder."""
