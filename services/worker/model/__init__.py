"""The model: transformers code with one registered attention function over paged KV."""
