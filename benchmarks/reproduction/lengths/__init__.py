"""S³'s experiments: scheduling by predicted output lengths, beside what else reserves KV memory."""
