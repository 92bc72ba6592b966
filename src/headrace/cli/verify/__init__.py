"""`headrace verify`: whether samples are the same bits however they are read, and if not, why."""
