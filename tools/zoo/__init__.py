"""The zoo: models as tables of parameters and costs, measured with torch on no device."""
