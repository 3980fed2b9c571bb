"""transformers and our quantizing cache. The only room where torch and transformers live."""
