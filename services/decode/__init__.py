"""The decode room: verified state in, frames of tokens out."""
