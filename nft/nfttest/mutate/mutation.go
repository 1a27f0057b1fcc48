package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strings"

	"nft-masq-agent/nft/nfttest"
)

// A mutation replaces some bytes of a file by code that does as before, unless the mutation
// is switched on.
type mutation struct {
	path          string
	function      string
	line          int
	from, to      int
	before, after string
	statement     bool // it is dropped; otherwise a condition becomes another one
	simple        bool // a statement before a condition: it has to stay a simple one
	n             int  // which of several equal ones of the function, from 1
}

// String identifies the mutation, whatever the lines above it are.
func (m mutation) String() string {
	clean := func(s string) string {
		s = strings.Join(strings.Fields(s), " ")
		if len(s) > 100 {
			s = s[:100] + "…"
		}
		return s
	}
	s := fmt.Sprintf("%s %s: %s => %s", m.path, m.function, clean(m.before), clean(m.after))
	if m.statement {
		s = fmt.Sprintf("%s %s: without %s", m.path, m.function, clean(m.before))
	}
	if m.n > 1 {
		s += fmt.Sprintf(" #%d", m.n)
	}
	return s
}

// code returns the code with the mutation, under a number.
func (m mutation) code(number int) string {
	switch {
	case m.simple:
		return fmt.Sprintf("func() { if !mutationIs(%d) { %s } }()", number, m.before)
	case m.statement:
		return fmt.Sprintf("if !mutationIs(%d) { %s }", number, m.before)
	}
	return fmt.Sprintf("(mutationIs(%d) && (%s) || !mutationIs(%[1]d) && (%[3]s))", number, m.after, m.before)
}

// overlaps reports whether two mutations change the same code.
func (m mutation) overlaps(o mutation) bool {
	return m.path == o.path && m.from < o.to && o.from < m.to
}

// swapped are the comparisons that take the place of others.
var swapped = map[token.Token]string{
	token.EQL: "!=", token.NEQ: "==", token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">",
}

// A finder finds the mutations of a file.
type finder struct {
	path     string
	source   []byte
	set      *token.FileSet
	function string
	before   map[ast.Node]bool // statements before a condition
	found    []mutation
}

// inFile returns the mutations of a file.
func inFile(path string) []mutation {
	f := finder{path: path, set: token.NewFileSet(), before: map[ast.Node]bool{}}
	f.source = nfttest.Must(os.ReadFile(path))
	file := nfttest.Must(parser.ParseFile(f.set, path, f.source, 0))
	for _, d := range file.Decls {
		if d, ok := d.(*ast.FuncDecl); ok && d.Body != nil {
			f.function = nameOf(d)
			ast.Inspect(d.Body, f.visit)
		}
	}
	return f.found
}

func (f *finder) at(p token.Pos) int { return f.set.Position(p).Offset }

func (f *finder) text(n ast.Node) string { return string(f.source[f.at(n.Pos()):f.at(n.End())]) }

// replace adds a mutation.
func (f *finder) replace(n ast.Node, after string) *mutation {
	f.found = append(f.found, mutation{
		path: f.path, function: f.function, line: f.set.Position(n.Pos()).Line, from: f.at(n.Pos()), to: f.at(n.End()),
		before: f.text(n), after: after,
	})
	return &f.found[len(f.found)-1]
}

// negate negates a condition. Of a comparison with == or !=, swapping is the same.
func (f *finder) negate(e ast.Expr) {
	if c, ok := e.(*ast.BinaryExpr); e != nil && (!ok || c.Op != token.EQL && c.Op != token.NEQ) {
		f.replace(e, "!("+f.text(e)+")")
	}
}

// drop drops a statement.
func (f *finder) drop(n ast.Node) {
	m := f.replace(n, "")
	m.statement, m.simple = true, f.before[n]
}

func (f *finder) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.IfStmt:
		f.before[n.Init] = true
		f.negate(n.Cond)
	case *ast.ForStmt:
		f.before[n.Init], f.before[n.Post] = true, true
		f.negate(n.Cond)
	case *ast.SwitchStmt:
		f.before[n.Init] = true
		for _, clause := range n.Body.List {
			for _, e := range clause.(*ast.CaseClause).List {
				if n.Tag == nil {
					f.negate(e)
				}
			}
		}
	case *ast.BinaryExpr:
		f.compare(n)
	case *ast.ExprStmt:
		if call, ok := n.X.(*ast.CallExpr); !ok || fmt.Sprint(call.Fun) != "panic" {
			f.drop(n)
		}
	case *ast.IncDecStmt, *ast.GoStmt, *ast.DeferStmt, *ast.SendStmt:
		f.drop(n)
	case *ast.BranchStmt:
		if n.Tok != token.FALLTHROUGH && n.Tok != token.GOTO {
			f.drop(n)
		}
	case *ast.ReturnStmt:
		if len(n.Results) == 0 {
			f.drop(n)
		}
	case *ast.AssignStmt:
		if n.Tok != token.DEFINE && slices.ContainsFunc(n.Lhs, func(e ast.Expr) bool { return fmt.Sprint(e) != "_" }) {
			f.drop(n)
		}
	}
	return true
}

// compare drops an operand, or swaps a comparison.
func (f *finder) compare(n *ast.BinaryExpr) {
	switch {
	case n.Op == token.LAND || n.Op == token.LOR:
		f.replace(n, f.text(n.X))
		f.replace(n, f.text(n.Y))
	case swapped[n.Op] != "":
		f.replace(n, f.text(n.X)+" "+swapped[n.Op]+" "+f.text(n.Y))
	}
}

// nameOf returns the name of a function with that of its receiver.
func nameOf(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	t := f.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	if generic, ok := t.(*ast.IndexExpr); ok {
		t = generic.X
	}
	return fmt.Sprint(t) + "." + f.Name.Name
}
