"""SGLang's HTTP server imports it for speech, which no test asks for."""
