"""Operations, one a file, each with one signature and lanes inside the operation."""
