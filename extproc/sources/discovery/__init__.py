"""Who is there: a fleet's nodes from a file, DNS or Kubernetes, several at once."""
