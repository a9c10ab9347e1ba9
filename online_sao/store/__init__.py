"""The database: `sql.SqlStore` (SQLite, PostgreSQL) and its double `memory.MemoryStore`."""
