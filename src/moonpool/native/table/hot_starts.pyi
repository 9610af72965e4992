# Everything in this module is for other native modules.
