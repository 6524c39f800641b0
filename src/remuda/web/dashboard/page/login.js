// The sign-in page: a token in the address's fragment never leaves the browser but by the form.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
document.getElementById("refused").hidden = !new URLSearchParams(location.search).has("refused");
if (location.hash) history.replaceState(null, "", location.pathname + location.search);
if (given) {
  document.getElementById("token").value = given;
  document.getElementById("sign-in").submit();
}
