module drakit.dev/testimage

go 1.24
