"""The vision encoder room: images in, embeddings kept in registered memory until they are read."""
