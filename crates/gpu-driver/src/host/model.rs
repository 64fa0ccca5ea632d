//! Model-checked tests of the queues and threads.
