"""Published steps, each predicted from the steps of other publishers alone."""
