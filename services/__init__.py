"""The services of a mesh, a package each. They never import one another: they talk."""
