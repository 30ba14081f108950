"""The dashboard: what result files have for it, and its charts as HTML."""
