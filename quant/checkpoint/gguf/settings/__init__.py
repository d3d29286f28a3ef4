"""What a GGUF file's metadata say, as the settings files of a Hugging Face folder."""
