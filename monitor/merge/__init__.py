"""The post-hoc reducer: the directories of all ranks of a job become one data set."""
