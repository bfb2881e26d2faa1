"""The engine of search on PostgreSQL with pgvector."""
