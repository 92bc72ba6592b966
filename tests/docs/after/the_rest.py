assert [batch.tolist() for batch in loader] == whole[1:]
