"""Makes a directory in Hugging Face layout from a GGUF file's header, so that the file alone can be served."""
