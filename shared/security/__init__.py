"""What a process shows and trusts: TLS material, API keys. Read from files, and again when those change."""
