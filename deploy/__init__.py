"""Files for putting Baton on machines; no code of the product."""
