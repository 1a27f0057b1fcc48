package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
)

// A mutation replaces some bytes of a file.
type mutation struct {
	path          string
	function      string
	line          int
	from, to      int
	before, after string
	n             int // which of several equal ones of the function, from 1
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
	if m.n > 1 {
		s += fmt.Sprintf(" #%d", m.n)
	}
	return s
}

// swapped are the comparisons that take the place of others.
var swapped = map[token.Token]string{
	token.EQL: "!=", token.NEQ: "==", token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">",
}

// inFile returns the mutations of a file.
func inFile(path string) (all []mutation, err error) {
	source, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, path, source, 0)
	if err != nil {
		return nil, err
	}
	function := ""
	at := func(p token.Pos) int { return set.Position(p).Offset }
	text := func(n ast.Node) string { return string(source[at(n.Pos()):at(n.End())]) }
	replace := func(n ast.Node, after string) {
		line := set.Position(n.Pos()).Line
		all = append(all, mutation{path, function, line, at(n.Pos()), at(n.End()), text(n), after, 0})
	}
	negate := func(e ast.Expr) {
		if c, ok := e.(*ast.BinaryExpr); e == nil || ok && (c.Op == token.EQL || c.Op == token.NEQ) {
			return // a swapped comparison is the same
		}
		replace(e, "!("+text(e)+")")
	}
	visit := func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.IfStmt:
			negate(n.Cond)
		case *ast.ForStmt:
			negate(n.Cond)
		case *ast.SwitchStmt:
			if n.Tag != nil {
				break
			}
			for _, clause := range n.Body.List {
				for _, e := range clause.(*ast.CaseClause).List {
					negate(e)
				}
			}
		case *ast.BinaryExpr:
			switch {
			case n.Op == token.LAND || n.Op == token.LOR:
				replace(n, text(n.X))
				replace(n, text(n.Y))
			case swapped[n.Op] != "":
				replace(n, text(n.X)+" "+swapped[n.Op]+" "+text(n.Y))
			case n.Op == token.ADD || n.Op == token.SUB:
				if literal, ok := n.Y.(*ast.BasicLit); ok && literal.Kind == token.INT {
					replace(n, text(n.X))
				}
			}
		case *ast.ExprStmt, *ast.IncDecStmt, *ast.GoStmt, *ast.DeferStmt, *ast.SendStmt:
			replace(n, "")
		case *ast.BranchStmt:
			if n.Tok != token.FALLTHROUGH && n.Tok != token.GOTO {
				replace(n, "")
			}
		case *ast.ReturnStmt:
			if len(n.Results) == 0 {
				replace(n, "")
			}
		case *ast.AssignStmt:
			if n.Tok != token.DEFINE && !allBlank(n.Lhs) {
				blanks := strings.TrimSuffix(strings.Repeat("_, ", len(n.Lhs)), ", ")
				replace(n, blanks+" = "+string(source[at(n.Rhs[0].Pos()):at(n.End())]))
			}
		}
		return true
	}
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
			function = nameOf(f)
			ast.Inspect(f.Body, visit)
		}
	}
	return all, nil
}

func allBlank(all []ast.Expr) bool {
	for _, e := range all {
		if name, ok := e.(*ast.Ident); !ok || name.Name != "_" {
			return false
		}
	}
	return true
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
