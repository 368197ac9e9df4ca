"""The commands as a user types them: tables, exit statuses, one sentence for whatever is wrong."""
