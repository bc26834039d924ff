"""The endpoints that programs made for OpenAI's API call. Below, they are samples like any others.

requests      what is asked for, checked; plan, made ready to be sampled
sources       which weights a model's name stands for
places        where samples are counted: a session of each owner, with a sampler for each source
asking        samples as jobs: submitted, waited for, given up
choices       tokens as text: whole characters, without stops
answers       what goes back, as one object or as events; errors, if it is a refusal
completions   the endpoints
"""
