"""The three rooms, the application that composes them, and the `baton` command."""
