"""Parts of which formats of tool calls are made (``tool_parsers``): tags, bare text typed by a schema, JSON."""
