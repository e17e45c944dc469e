"""Packs: a data set as a few large files, which open at once and which other tools read.

Writing: find_source → from_folder, from_store, from_tar or from_parquet → image_form → shard_file, all driven
by write_pack with its pack_journal. Reading: pack_set → pack_facts → pack_source or raw_split.
`docs/packs.md` has the format.
"""
