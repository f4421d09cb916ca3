"""What `stagemesh doctor` knows: facts of a host (`facts`), and what they mean for a deployment (`judge`, pure)."""
