"""What a sweep searches: values, combinations, and which of them go on."""
