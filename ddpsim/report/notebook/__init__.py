"""Results as notebooks show them: tables of HTML, and figures of plotly."""
