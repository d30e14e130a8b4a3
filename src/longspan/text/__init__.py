"""Text for language models: documents, a tokenizer, shards of tokens, batches, and needles in haystacks."""
