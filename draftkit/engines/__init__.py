"""Other people's engines: the folders that they load, and what they count while they draft."""
