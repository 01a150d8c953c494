"""Files that others wrote, read as ddpsim's own data: logs, profiles, parameter lists."""
