"""The CUDA back end: transformers' model with paged attention from FlashInfer, decodes as CUDA graphs."""
