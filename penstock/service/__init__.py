"""Many instances behind one endpoint. Decides and carries; never touches a tensor."""
