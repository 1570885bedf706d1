"""Kimi K3's text model over paged latents and state slots."""
