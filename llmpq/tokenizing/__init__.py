"""A model's tokenizer and chat template in a process of their own: time and memory a row."""
