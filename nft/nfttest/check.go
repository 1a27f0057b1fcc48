package nfttest

// A failure is why a part of a program ends.
type failure struct{ error }

// Check ends the part of a program that Part runs, as t.Fatal ends a test, if there is an error. It may be called on
// the part's own goroutine alone.
func Check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// Must is Check for a function with a result.
func Must[T any](v T, err error) T {
	Check(err)
	return v
}

// Part runs a part of a program, and returns the error with which it ended.
func Part(fn func()) (err error) {
	defer func() {
		switch ended := recover().(type) {
		case nil:
		case failure:
			err = ended.error
		default:
			panic(ended)
		}
	}()
	fn()
	return nil
}
