"""SQL text: tables and conditions."""
