"""What a shell needs to complete what is typed."""
