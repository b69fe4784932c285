"""What tests share that is not a fixture: tiny models, a tokenizer, rows of data, the network guard."""
