"""A model's tokenizer and chat template, in a process that bounds the time and memory of a row."""
