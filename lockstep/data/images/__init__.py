"""Images in files: listing a folder, decoding JPEG and PNG, and splits that decode when they are read."""
